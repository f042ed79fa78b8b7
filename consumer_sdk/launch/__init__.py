"""How the three commands start and end."""
