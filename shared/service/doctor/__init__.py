"""What `weightcast doctor` looks at before anything is published or followed here.

`trials`, `places` and `machine` find facts and judge nothing; `channel_rules`, `local_rules` and
`machine_rules` judge facts and read nothing; `findings` says what judgements mean for the exit code.
"""
