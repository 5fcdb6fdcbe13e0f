"""The parts of `manage.py demo`.

processes: start and stop the site and the workers. visitor: order one picture twice, cancel a render. traffic: send
orders over HTTP. observation: sample the database and
Redis from outside, and kill a worker. verdict: check the results. report: print them. sheet: make the contact sheet.
"""
