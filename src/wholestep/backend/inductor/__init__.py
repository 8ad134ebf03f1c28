"""TorchInductor: compiles a bound graph as a whole or by regions, each distinct region once."""
