"""The HTTP API: routes, middleware, multipart, the Open Inference Protocol, the page."""
