"use strict";
const $ = (id) => document.getElementById(id);
const count = (n) => Math.round(n).toLocaleString("en-US");
let messages = [], under = null, model = "", before = null;
const rates = [];

const headers = () => {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: "Bearer " + key }) };
};

// Lines of a stream of server-sent events: what stands behind "data: ".
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

async function failure(response) {
  try { return (await response.json()).error.message; } catch { return response.status + " " + response.statusText; }
}

// The chat

function add(role) {
  $("empty")?.remove();
  const turn = document.createElement("div"), body = document.createElement("div");
  turn.className = "turn " + role;
  body.className = "body";
  turn.append(body);
  $("log").append(turn);
  return turn;
}

function put(turn, part, text) {
  const log = $("log"), low = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  if (part === "thoughts") {
    let box = turn.querySelector(".thoughts");
    if (!box) {
      box = document.createElement("details");
      box.className = "thoughts";
      box.open = true;
      box.innerHTML = "<summary>Thinking</summary><div></div>";
      turn.prepend(box);
    }
    box.lastElementChild.append(text);
  } else {
    const box = turn.querySelector(".thoughts");
    if (box && !turn.dataset.said) box.open = false;
    turn.dataset.said = "1";
    turn.querySelector(".body").append(text);
  }
  if (low) log.scrollTop = log.scrollHeight;
}

function note(turn, text, bad) {
  const line = document.createElement("p");
  line.className = bad ? "note bad" : "note";
  line.textContent = text;
  turn.append(line);
  $("log").scrollTop = $("log").scrollHeight;
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("chat").setAttribute("aria-busy", on);
}

async function ask(text) {
  const turns = messages;  // a new chat has others
  turns.push({ role: "user", content: text });
  put(add("user"), "body", text);
  const turn = add("assistant"), began = performance.now();
  let first = 0, usage = null, said = { role: "assistant", content: "" }, why = "";
  under = new AbortController();
  busy(true);
  try {
    const body = {
      model, messages: turns, stream: true, stream_options: { include_usage: true },
      temperature: Number($("temperature").value), max_completion_tokens: Number($("most").value) || undefined,
      thinking: { type: $("thinking").checked ? "enabled" : "disabled" },
    };
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: under.signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      why = choice.finish_reason ?? why;
      const { reasoning_content: thoughts, content } = choice.delta;
      if ((thoughts || content) && !first) first = performance.now();
      if (thoughts) { put(turn, "thoughts", thoughts); said.reasoning_content = (said.reasoning_content ?? "") + thoughts; }
      if (content) { put(turn, "body", content); said.content += content; }
    }
    turns.push(said);
    if (why === "length") note(turn, "Cut: it has as many tokens as were asked for.");
  } catch (error) {
    if (error.name === "AbortError") { turns.push(said); note(turn, "stopped"); }
    else { turns.pop(); note(turn, error.message, true); if (/API key/.test(error.message)) { $("key-box").open = true; $("key").focus(); } }
  }
  under = null;
  busy(false);
  if (usage) {
    const cached = usage.prompt_tokens_details.cached_tokens, last = performance.now();
    const rate = usage.completion_tokens / ((last - began) / 1000);
    $("last-cached").textContent = count(cached);
    $("last-prompt").textContent = count(usage.prompt_tokens);
    $("last-bar").firstElementChild.style.width = (100 * cached) / usage.prompt_tokens + "%";
    $("last-speed").textContent = rate.toFixed(1);
    $("last-first").textContent = first ? count(first - began) : "–";
    note(turn, `${count(usage.completion_tokens)} tokens, ${rate.toFixed(1)} a second, ${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached`);
  }
  $("chat").dataset.turns = messages.length / 2;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || under) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
const halt = () => under?.abort();
$("stop").addEventListener("click", () => { halt(); $("text").focus(); });
function fresh() {
  halt();
  messages = [];
  $("log").replaceChildren();
  $("text").focus();
}
$("fresh").addEventListener("click", fresh);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") halt();
  if (event.altKey && event.key.toLowerCase() === "n") { event.preventDefault(); fresh(); }
});

// The cache

function state(up, text) {
  $("state").className = up ? "up" : "down";
  $("state-text").textContent = text;
}

function tier(name, label, pool) {
  let box = $("tier-" + name);
  if (!box) {
    box = document.createElement("div");
    box.id = "tier-" + name;
    box.className = "tier";
    box.innerHTML = '<p><span></span><span></span></p><div class="bar" role="img"><i class="private"></i><i class="held"></i><i class="cached"></i></div>';
    $("tiers").append(box);
  }
  const [title, text] = box.querySelectorAll("span"), bar = box.lastElementChild;
  const parts = [pool.private, pool.cached - pool.evictable, pool.evictable];
  title.textContent = label;
  text.textContent = `${count(parts[0] + parts[1])} in use, ${count(parts[2])} cached, of ${count(pool.total)}`;
  bar.setAttribute("aria-label", label + ": " + text.textContent);
  parts.forEach((part, i) => { bar.children[i].style.width = (100 * part) / pool.total + "%"; });
  box.dataset.cached = pool.cached;
}

function draw(now) {
  if (now.problem) { state(false, now.problem); return; }
  state(!now.paused, now.paused ? "paused" : "ready");
  for (const name of ["live", "queued", "preempted"]) $(name).textContent = count(now[name]);
  const shown = Math.min(now.slots, 256), slots = $("slots");
  while (slots.children.length < shown) slots.append(document.createElement("i"));
  [...slots.children].forEach((one, i) => one.classList.toggle("on", i < now.live));
  $("slots-text").textContent = `${now.live} of ${now.slots}`;
  slots.setAttribute("aria-label", `${now.live} of ${now.slots} slots are taken`);
  if (now.pools.device) tier("device", "device", now.pools.device);
  if (now.pools.host) tier("host", "host memory, in pages", now.pools.host);
  if (now.stored) tier("stored", "storage", { total: now.stored, private: 0, cached: now.stored, evictable: now.stored });
  $("lookup").textContent = count(now.lookup_tokens);
  for (const name of ["device", "host", "storage"]) $("hit-" + name).textContent = count(now.hit_tokens[name] ?? 0);
  for (const [name, key] of [["preemptions", "preemptions"], ["transfers", "transfers"], ["sampled", "sampled_tokens"]])
    $(name).textContent = count(now.counts[key] ?? 0);
  if (before) {
    const rate = ((now.counts.sampled_tokens ?? 0) - (before.counts.sampled_tokens ?? 0)) / Math.max(now.time - before.time, 0.1);
    rates.push(Math.max(rate, 0));
    if (rates.length > 120) rates.shift();
    $("rate").textContent = count(rates.at(-1));
    const top = Math.max(...rates, 1);
    const step = 120 / Math.max(rates.length - 1, 30);
    const points = rates.map((r, i) => `${(i * step).toFixed(1)},${(31 - (30 * r) / top).toFixed(1)}`);
    $("spark").firstElementChild.setAttribute("points", points.join(" "));
  }
  before = now;
}

async function metrics() {
  try {
    const text = await (await fetch("metrics")).text(), value = (name) => {
      const found = text.match(new RegExp("^" + name + "(?:\\{[^}]*\\})? (\\S+)$", "m"));
      return found ? Number(found[1]) : NaN;
    };
    const mean = value("vllm:time_to_first_token_seconds_sum") / value("vllm:time_to_first_token_seconds_count");
    if (Number.isFinite(mean)) $("ttft").textContent = (mean * 1000).toFixed(1) + " ms";
  } catch { /* the event stream says what is wrong */ }
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function watch() {
  for (;;) {
    try {
      const response = await fetch("events", { headers: headers() });
      if (!response.ok) throw new Error(await failure(response));
      for await (const data of events(response)) draw(JSON.parse(data));
      throw new Error("the server has gone");
    } catch (error) {
      state(false, error instanceof TypeError ? "the server cannot be reached" : error.message);
    }
    await pause(2000);
  }
}

async function name() {
  for (;;) {
    try {
      const response = await fetch("v1/models", { headers: headers() });
      if (!response.ok) throw new Error(await failure(response));
      const first = (await response.json()).data[0];
      model = first.id;
      if (first.max_model_len) $("most").value = Math.min($("most").value, Math.ceil(first.max_model_len / 4));
      $("model").textContent = model;
      document.title = model + " · dsv4_jax";
      return;
    } catch { await pause(2000); }
  }
}

name();
watch();
metrics();
setInterval(metrics, 5000);
