"""Talks to SGLang: starts servers and the router, and speaks their HTTP."""
