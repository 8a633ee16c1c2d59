"""What happened: the report of one owner's transfers and residency, and the recording of when they were."""

from omni_offload.trace.recorder import Recorder, recording_of
from omni_offload.trace.recording import HeldBytes, Lane, Recording, Span
from omni_offload.trace.report import ComponentReport, OffloadReport

__all__ = ["ComponentReport", "HeldBytes", "Lane", "OffloadReport", "Recorder", "Recording", "Span", "recording_of"]
