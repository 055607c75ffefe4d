"""What nobody can beat, not even a discipline that knows every arrival beforehand: upper bounds by relaxation.

A rate is refuted where one of three proofs shows that some model loses more than it may: all batches together need more
device time than there is (`device_time.py`), one server as fast as all devices together loses too much (`fluid.py`), or, for
one model on one device, no schedule does it (`one_device.py`, exact). `asked.py` is what they are told, `highest.py` puts
them together. Why each holds: docs/results/disciplines.md, "What nobody could beat".
"""
