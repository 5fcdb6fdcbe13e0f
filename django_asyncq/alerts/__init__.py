"""Alerts without a monitor: look what is wrong, and say it by mail or to a webhook, as ASYNCQ["ALERTS"] has it.

`findings` looks and changes nothing. `decision` says, of what a look has found and what earlier looks have noted, what
is to be sent; `row_notes` keeps the notes in the database, and `local_notes` those about the database itself.
`message` writes the message, `mail` and `webhook` send it, and `alerter` does one round of all this. The leader does it
about once a minute, `manage.py asyncq alerts check --send` whenever it is called: of two senders one sends.

No message has an argument, an error or a result of a task in it, and nothing is sent to an address that is not in the
settings.
"""
