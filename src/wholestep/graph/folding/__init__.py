"""Equal layers of a captured step: finding them, and the step with fewer of them."""
