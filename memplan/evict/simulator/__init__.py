"""An evicting runtime, simulated op by op, for policies that decide on demand (DTR, DELTA, flow).

Start at `eviction_simulator.py`; `device_state.py` knows where every storage is, `memory.py` counts bytes or addresses.
"""
