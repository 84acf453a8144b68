"""The translation service: an asyncio engine room (`service`), and an HTTP server in front of it (`server`)."""
