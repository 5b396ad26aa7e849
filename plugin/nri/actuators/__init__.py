"""Ways to change the limits of a running container other than Tasks.Update (:mod:`weenv.plugin.nri.actuate`)."""
