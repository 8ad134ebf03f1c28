"""Tests of wholestep-foresight: make test-foresight."""
