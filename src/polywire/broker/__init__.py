"""What a broker means, in our words."""
