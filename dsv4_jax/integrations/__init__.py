"""What the programs around an engine read and call: routers, NVIDIA Dynamo. Each needs an extra of its own.

`kv_events`: what is cached, as routers read it (extra `events`). `dynamo`: a worker (ai-dynamo).
"""
