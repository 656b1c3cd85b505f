"""What happens to a batch between the engine and the user."""
