"""Units, errors, ports, launch environment and the step-report protocol: no IO, no dependencies but msgspec."""
