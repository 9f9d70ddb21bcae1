"""Pipeline schedules as data, and the simulator that times them."""
