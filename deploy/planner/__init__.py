"""Which layout suits which traffic on which devices: profiles, a simulator, and the plan that follows from both."""
