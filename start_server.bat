@echo off
rem Starts Smart Embedder in a virtual environment of its own (local) or in a container (docker).
rem Only finds a Python and hands over to launcher\, which start_server.sh shares.
rem Programs are called: one that is itself a batch file, as pyenv's python is, would not come back.
setlocal EnableExtensions DisableDelayedExpansion
cd /d "%~dp0"
set "FOUND="
if defined PYTHON goto named_python
for %%V in ("py -3.13" "py -3.12" "py -3.11" python3 python .venv\Scripts\python.exe) do call :try_python %%~V
if not defined FOUND goto no_python

:hand_over
%FOUND% -m launcher %*
exit /b %ERRORLEVEL%

:named_python
call :try_python "%PYTHON%"
if defined FOUND goto hand_over
>&2 echo start_server: "PYTHON=%PYTHON%" is not a working Python 3.11 or newer.
exit /b 1

:try_python
if defined FOUND exit /b 0
call %* -c "import sys; sys.exit(sys.version_info < (3, 11))" >nul 2>&1
if %ERRORLEVEL% equ 0 set FOUND=%*
exit /b 0

rem With no Python nothing is asked and nothing tuned: the container starts as .env describes it.
:no_python
if /i "%~1"=="docker" shift
set "FLAVOUR="
if "%~1"=="" set "FLAVOUR=auto"
for %%W in (cpu gpu auto) do if /i "%~1"=="%%W" set "FLAVOUR=%%W"
if not "%~2"=="" set "FLAVOUR="
if not defined FLAVOUR goto python_missing
call docker --version >nul 2>&1
if %ERRORLEVEL% neq 0 goto both_missing
call docker compose version >nul 2>&1
if %ERRORLEVEL% neq 0 goto compose_missing
call docker info >nul 2>&1
if %ERRORLEVEL% neq 0 goto daemon_missing
if not "%FLAVOUR%"=="auto" goto start_container
set "FLAVOUR=cpu"
call nvidia-smi >nul 2>&1
if %ERRORLEVEL% equ 0 set "FLAVOUR=gpu"
:start_container
call docker compose -f docker-compose.%FLAVOUR%.yml up --build -d
if %ERRORLEVEL% neq 0 goto docker_failed
echo Smart Embedder is starting. Logs: docker compose -f "%CD%\docker-compose.%FLAVOUR%.yml" logs -f
exit /b 0

:python_missing
>&2 echo start_server: Python 3.11 or newer was not found: install it, or set PYTHON to its path.
exit /b 1

:both_missing
>&2 echo start_server: neither Python 3.11 or newer nor docker was found: install one of them.
exit /b 1

:compose_missing
>&2 echo start_server: 'docker compose' was not found: install Docker's compose plugin, 2.24.4 or newer.
exit /b 1

:daemon_missing
>&2 echo start_server: the Docker daemon does not answer, or you may not use it: 'docker info' says why.
exit /b 1

:docker_failed
>&2 echo start_server: docker compose could not start the service; its message above says why.
exit /b 1
