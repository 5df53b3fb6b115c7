"""One hypothesis profile for the folder."""

from hypothesis import settings

# No deadline: on a loaded machine single examples take arbitrarily long, which says nothing about the code.
settings.register_profile("moonvit", deadline=None)
settings.load_profile("moonvit")
