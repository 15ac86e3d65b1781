"""Several hosts as one program: how they find each other, what they say, and who does what."""
