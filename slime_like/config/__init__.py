"""The vocabulary of the command line: frozen dataclasses, one declaration a flag."""
