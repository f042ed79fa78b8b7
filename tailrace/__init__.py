"""How the commands start: the little that must happen before anything else is loaded."""
