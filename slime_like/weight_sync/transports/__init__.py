"""How weights travel: a publisher for each row of config/transports.py, and what several of them share."""
