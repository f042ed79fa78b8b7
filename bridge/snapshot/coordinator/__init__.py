"""Takes snapshot requests and runs them, one export and several workers each."""
