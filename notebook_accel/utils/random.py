"""Seeds and random states; the work is in ``training.random_state``."""

from notebook_accel.training.random_state import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
