"""What `test_bad_steps` expects: the error of each bad step, with N for line numbers."""

TEXTS = {
    "reads_item": """\
RuleError: the train step reads the value of a tensor, on which its further course depends
  at     test_bad_steps.py:N in reads_item
  found  aten._local_scalar_dense.default
  fix    compute with tensors (torch.where), or read values from what the compiled step returns""",
    "branches": """\
RuleError: the train step reads the value of a tensor, on which its further course depends
  at     test_bad_steps.py:N in branches
  found  aten._local_scalar_dense.default
  fix    compute with tensors (torch.where), or read values from what the compiled step returns""",
    "converts": """\
RuleError: the train step reads the value of a tensor, on which its further course depends
  at     test_bad_steps.py:N in converts
  found  aten._local_scalar_dense.default
  fix    compute with tensors (torch.where), or read values from what the compiled step returns""",
    "has_no_rule": """\
RuleError: a part of the batch is not enough: dim 0 has the samples, and the operation needs the whole dim
  at         test_bad_steps.py:N in has_no_rule
  operation  aten.logcumsumexp.default
  operand 0  8 x 3, sharded dim 0
  either     compute it from values of one sample each, or of sums over samples
  or         train with data_parallel or fully_shard""",
    "steps_another": """\
RuleError: the train step steps an optimizer that is not among its arguments: SGD
  at   test_bad_steps.py:N in steps_another
  fix  pass it to the compiled function: compiled(model, optimizer, batch)""",
    "changes_lr": """\
RuleError: the train step changes hyperparameters of an optimizer: lr
  because  it is traced once, so later steps would not change them
  fix      call the scheduler after the compiled step: its new values are used without compiling again""",
    "replaces": """\
RuleError: the train step replaces `0.bias`
  at   test_bad_steps.py:N in replaces
  fix  change its values in place, as with copy_()""",
    "breaks": """\
RuleError: the train step cannot be traced
  at     test_bad_steps.py:N in breaks
  found  ZeroDivisionError: division by zero
  fix    run it once without compile(): the error is the same, or it needs values of tensors""",
    "loops_over_samples": """\
RuleError: the train step runs other operations for another batch size
  at         test_bad_steps.py:N in <genexpr>, at 0
  operation  aten.view.default
  fix        let its control flow not depend on the batch size, and do not loop over samples""",
    "on_one_rank": """\
RuleError: compile(on_one_rank): rank 1 has a fault, so nothing was done on any rank
  rank 1  the train step reads the value of a tensor, on which its further course depends
            at     test_bad_steps.py:N in reads_item
            found  aten._local_scalar_dense.default
            fix    compute with tensors (torch.where), or read values from what the compiled step returns""",
    "no_model": """\
LayoutError: the train step was called without a module
  arguments  Adam, tuple
  fix        pass the model to the compiled function: compiled(model, optimizer, batch)""",
    "other_samples": """\
LayoutError: the tensors of the batch have different numbers of samples
  shapes  4 x 5, 3 x 3
  fix     pass as many samples in each; dim 0 has them, or DataParallel(..., input_batch_dim=d)""",
    "no_samples": """\
LayoutError: the batch has no samples
  shapes  0 x 5, 0 x 3
  fix     pass as many samples in each; dim 0 has them, or DataParallel(..., input_batch_dim=d)""",
    "other_samples_on_one_rank": """\
LayoutError: compile(plain_step): rank 1 has a fault, so nothing was done on any rank
  rank 1  the tensors of the batch have different numbers of samples
            shapes  4 x 5, 3 x 3
            fix     pass as many samples in each; dim 0 has them, or DataParallel(..., input_batch_dim=d)""",
    "other_dtype": """\
DisagreementError: compile(plain_step): arguments of rank 0 does not match with arguments of rank 1; nothing was moved
  arguments  rank 0  Adam
                     tensor batch x 5 torch.float32
                     tensor batch x 3 torch.float32
             rank 1  Adam
                     tensor batch x 5 torch.float32
                     tensor batch x 3 torch.float64
  fix        give every rank of the group the same arguments""",
    "other_dims": """\
DisagreementError: compile(plain_step): arguments of rank 0 does not match with arguments of rank 1; nothing was moved
  arguments  rank 0  Adam
                     tensor batch x 5 torch.float32
                     tensor batch x 3 torch.float32
             rank 1  Adam
                     tensor batch x 5 torch.float32
                     tensor batch x 2 torch.float32
  fix        give every rank of the group the same arguments""",
    "other_number": """\
DisagreementError: compile(plain_step): arguments of rank 0 does not match with arguments of rank 1; nothing was moved
  arguments  rank 0  Adam
                     tensor batch x 5 torch.float32
                     tensor batch x 3 torch.float32
                     0
             rank 1  Adam
                     tensor batch x 5 torch.float32
                     tensor batch x 3 torch.float32
                     1
  fix        give every rank of the group the same arguments""",
    "other_model": """\
LayoutError: Adam steps a parameter of a module that is no argument
  optimizer  number 0 of the arguments
  shape      (6, 5)
  fix        pass every module whose parameters the step trains: compiled(model, head, optimizer, batch)""",
    "frozen_on_one_rank": """\
DisagreementError: compile(plain_step): parameters of rank 0 does not match with parameters of rank 1; nothing was moved
  parameters  rank 0  0.weight (6, 5) torch.float32 True
                      0.bias (6,) torch.float32 True
                      2.weight (3, 6) torch.float32 True
                      2.bias (3,) torch.float32 True
              rank 1  0.weight (6, 5) torch.float32 True
                      0.bias (6,) torch.float32 False
                      2.weight (3, 6) torch.float32 True
                      2.bias (3,) torch.float32 True
  fix         give every rank of the group the same parameters""",
    "replaced_parameter": """\
StaleParameterError: a module has changed since the train step was compiled
  module   0
  changed  bias
  fix      call reset() on the compiled step: the next call compiles it for the modules as they are""",
    "added_layer": """\
StaleParameterError: a module has changed since the train step was compiled
  module   {kind}
  changed  3
  fix      call reset() on the compiled step: the next call compiles it for the modules as they are""",
    "gradients": """\
RuleError: the train step adds to gradients that are there before it, which is not compiled
  fix  call optimizer.zero_grad() in the step before backward, or before each call""",
    "replaced_second": """\
StaleParameterError: a module has changed since the train step was compiled
  module   2
  changed  bias
  fix      call reset() on the compiled step: the next call compiles it for the modules as they are""",
    "removed_layer": """\
StaleParameterError: a module has changed since the train step was compiled
  module   {kind}
  changed  it has fewer than before
  fix      call reset() on the compiled step: the next call compiles it for the modules as they are""",
    "replaced_on_one_rank": """\
StaleParameterError: compile(plain_step): rank 1 has a fault""",
    "other_batch": """\
DisagreementError: compile(plain_step)""",
    "gradients_on_one_rank": """\
RuleError: compile(adding_step): rank 1 has a fault""",
    "other_optimizer": """\
DisagreementError: compile(plain_step): arguments of rank 0 does not match with arguments of rank 1; nothing was moved
  arguments  rank 0  SGD
                     tensor batch x 5 torch.float32
                     tensor batch x 3 torch.float32
             rank 1  Adam
                     tensor batch x 5 torch.float32
                     tensor batch x 3 torch.float32
  fix        give every rank of the group the same arguments""",
}
