"""The choice among plans: templates, what each costs, bounds that spare looking at most of them."""
