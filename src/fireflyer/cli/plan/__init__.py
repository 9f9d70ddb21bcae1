"""`ff plan`: networks, their cost, models, and published figures, before anything is bought."""
