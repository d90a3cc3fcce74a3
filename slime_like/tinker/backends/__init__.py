"""The trainer's verbs and the engines, as the server's service wants them (protocols.py)."""
