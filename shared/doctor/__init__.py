"""`weightcast doctor`: observations, rules and remedies, and the sizing plan."""
