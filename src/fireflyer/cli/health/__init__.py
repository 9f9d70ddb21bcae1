"""`ff health` and `ff validate`: is something wrong with this node?"""
