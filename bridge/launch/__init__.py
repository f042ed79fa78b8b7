"""How the commands start and end: the little that must happen before anything else is loaded."""
