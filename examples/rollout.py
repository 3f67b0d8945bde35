"""Policy gradients on a tiny model: an `Engine` samples, its weights change under it, and its scores agree.

What is rewarded is a token of the upper half of the vocabulary: half of them at first, nearly all after six rounds.
Each round several answers to each prompt are sampled with their log-probabilities, what they earn beyond the mean of
their prompt's weighs their gradients (`forward_uncached` is differentiable), and the engine goes on with the weights
that come of it: nothing is compiled again, and nothing that older weights have cached is found. The text is scored by
the engine as well: the largest difference from what sampling said is float32 rounding.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as dsv4
from dsv4_jax import model
from dsv4_jax.engine import Completion, Engine, Prompt

CONFIG = dsv4.DSV4Config.tiny(layer_types=(dsv4.AttentionType.SWA, dsv4.AttentionType.CSA), num_hash_layers=0)
LAYOUT = dsv4.CacheLayout(CONFIG, "f32", "f32", block_tokens=16)
SIZE = dsv4.CacheSize(num_blocks=48, num_slots=16, max_blocks_per_request=4, num_snapshots=8)
PROMPT, ANSWER = 20, 12  # tokens


@jax.jit
def improved(params: model.Params, texts: jax.Array, worth: jax.Array, rate: jax.Array) -> model.Params:
    """One step on texts [N, PROMPT + ANSWER] whose answers are worth so much [N]."""

    def loss(params: model.Params) -> jax.Array:
        logits = jax.lax.map(lambda text: model.forward_uncached(CONFIG, params, text), texts)[:, PROMPT - 1 : -1]
        drawn = jnp.take_along_axis(jax.nn.log_softmax(logits), texts[:, PROMPT:, None], 2)[..., 0]
        return -(worth[:, None] * drawn).mean()

    grads = jax.grad(loss, allow_int=True)(params)
    step = lambda p, g: p - rate * g if jnp.issubdtype(p.dtype, jnp.floating) else p  # noqa: E731
    return jax.tree.map(step, params, grads)


def main(argv: list[str] | None = None) -> list[tuple[float, float]]:
    """Returns of each round the mean reward, and the largest difference of a log-probability."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=3.0, help="of learning (default: %(default)s)")
    args, random = parser.parse_args(argv), np.random.default_rng(0)
    params, prompts, rounds = model.init_params(CONFIG), random.integers(0, CONFIG.vocab_size, (4, PROMPT)), []
    with Engine.of(params, LAYOUT, SIZE, weights_id="round 0", chunk_tokens=96) as engine:
        for number in range(1, args.rounds + 1):
            how = model.Sampling(temperature=1.0, seed=number)
            asked = [Prompt(tokens=p, max_new_tokens=ANSWER, sampling=how, n=4, logprobs=0) for p in prompts]
            samples: list[Completion] = [each for answers in engine.run(asked) for each in answers]
            texts = np.array([[*prompts[i // 4], *each.tokens] for i, each in enumerate(samples)], np.int32)
            scores = np.array([each.logprobs[PROMPT - 1 :] for each in engine.score(texts)])
            apart = float(abs(scores - np.array([each.logprobs for each in samples])).max())
            reward = (texts[:, PROMPT:] >= CONFIG.vocab_size // 2).mean(1).reshape(len(prompts), -1)
            worth = ((reward - reward.mean(1, keepdims=True)) / (reward.std() + 1e-6)).ravel().astype(np.float32)
            params = improved(params, texts, worth, np.float32(args.rate))
            engine.update_weights(params, f"round {number}")
            rounds.append((float(reward.mean()), apart))
            print(f"round {number:3}: reward {reward.mean():.3f}, log-probabilities differ by {apart:.1e} at most")
    return rounds


if __name__ == "__main__":
    main()
