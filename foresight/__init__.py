"""The distribution wholestep-foresight: its package, its tests, and how accurate it is."""
