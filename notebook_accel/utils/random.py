"""Seeds and random states, as in ``accelerate.utils.random``."""

from notebook_accel.training.random_state import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
