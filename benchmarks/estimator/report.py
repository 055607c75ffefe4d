PAGE = None


def written(a, b):
    return a
