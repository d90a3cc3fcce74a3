"""The plan as text, as JSON and as a picture."""
