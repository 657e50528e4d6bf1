"""Inspection: what single features stand for, whether their basis is special, and what they see in an image."""
