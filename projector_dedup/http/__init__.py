"""HTTP endpoints that repeat their recorded answer when a client repeats a request (docs/http.md), and webhooks.

``starlette`` is for FastAPI and Starlette, and ``flask`` for Flask; each needs the extra of its name. ``recording`` is
what they share: use it to write an endpoint for another framework. Each endpoint is a command of
``projector_dedup.commands``. ``webhook`` verifies the events that a provider sends, and delivers each of them once
(docs/webhooks.md).
"""
