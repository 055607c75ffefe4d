"""The frontend: owns each request, its payload and its one answer."""
