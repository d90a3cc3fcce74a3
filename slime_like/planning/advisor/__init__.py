"""Proposes layouts that fit."""
