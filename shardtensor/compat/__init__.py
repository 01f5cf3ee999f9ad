"""The module paths of ``torch.distributed._shard``, under ``shardtensor``: thin modules of re-exports.

``shardtensor/__init__.py`` puts this folder on the path of the package, so that
``torch.distributed._shard.sharding_spec.api`` is ``shardtensor.sharding_spec.api``.
"""
