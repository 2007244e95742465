"""Ring attention inside other people's models.

Owns one room per library. Refuses to be imported by the rest of ringattn: each room needs its library installed.
"""
