"""MariaDB and MySQL, with a class for each of the drivers PyMySQL, mysqlclient, asyncmy and aiomysql."""

from .dialect import MariaDB
from .drivers import Aiomysql, Asyncmy, MySQLClient, PyMySQL

__all__ = ["Aiomysql", "Asyncmy", "MariaDB", "MySQLClient", "PyMySQL"]
