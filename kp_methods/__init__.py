"""Approximate and choosing composers, and edits of packs; `knowledge_packs.composers` names the composers.

`kp_methods.packet.training` trains soft tokens.
"""

from kp_methods.auto import AutoComposer
from kp_methods.calibration import Calibration, CalibrationQuestion, CalibrationRow, calibrate_composers
from kp_methods.packet import PacketComposer
from kp_methods.select import SelectComposer
from kp_methods.splice import SpliceComposer

__all__ = [
    "AutoComposer",
    "Calibration",
    "CalibrationQuestion",
    "CalibrationRow",
    "PacketComposer",
    "SelectComposer",
    "SpliceComposer",
    "calibrate_composers",
]
