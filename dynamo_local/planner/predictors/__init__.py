"""What continues a series of window values: `constant`, `kalman`, `arima`, `prophet`, each behind one Protocol.

`answering.answer(task)` is the way in; `options` says what can be asked for. Pure: `arima` and `prophet` import the
libraries of the extra `predictors` when they are first used, which is done in a process of its own (`forecasting`).
"""
