"""Sites: what they are, how they are named, how selections pick them, and errors about them."""
