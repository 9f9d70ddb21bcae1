"""Operations on memory of a device, piece by piece through host memory. Imports no torch."""
