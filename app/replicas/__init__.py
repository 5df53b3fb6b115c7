"""Towers in processes of their own, one per device, behind the one service: a device error or a kill costs a restart of
that process, and no request.
"""

from app.replicas.facts import TowerFacts, TowerSpec, TowerStatus
from app.replicas.inline import EngineTower
from app.replicas.tower import WorkerTower
from app.replicas.towers import ReportingTower, Towers

__all__ = ["EngineTower", "ReportingTower", "TowerFacts", "TowerSpec", "TowerStatus", "Towers", "WorkerTower"]
