"""The translation service: an asyncio core (`service`), and an HTTP server in front of it (`server`)."""
