@echo off
rem Starts Smart Embedder in a virtual environment of its own (local) or in a container (docker).
rem Asks nothing, and installs nothing unless the requirements changed since the last start.
setlocal EnableExtensions DisableDelayedExpansion
set "MODE="
set "FLAVOUR="
set "DEMO="

:next_argument
if [%1]==[] goto arguments_read
set "GIVEN_MODE="
set "GIVEN_FLAVOUR="
for %%W in (local docker) do if /i "%~1"=="%%W" set "GIVEN_MODE=%%W"
for %%W in (cpu gpu auto) do if /i "%~1"=="%%W" set "GIVEN_FLAVOUR=%%W"
if defined GIVEN_MODE goto mode_argument
if defined GIVEN_FLAVOUR goto flavour_argument
if /i not "%~1"=="--demo" goto usage
set "DEMO=yes"
shift
goto next_argument

:mode_argument
if defined MODE goto usage
if defined FLAVOUR goto usage
set "MODE=%GIVEN_MODE%"
shift
goto next_argument

:flavour_argument
if defined FLAVOUR goto usage
set "FLAVOUR=%GIVEN_FLAVOUR%"
shift
goto next_argument

:arguments_read
if not defined MODE set "MODE=docker"
if defined DEMO if "%MODE%"=="docker" goto usage
if "%FLAVOUR%"=="cpu" goto flavour_chosen
if "%FLAVOUR%"=="gpu" goto flavour_chosen
set "FLAVOUR=cpu"
nvidia-smi >nul 2>&1
if %ERRORLEVEL% equ 0 set "FLAVOUR=gpu"

:flavour_chosen
cd /d "%~dp0"
if "%MODE%"=="docker" goto start_docker

rem .unfinished marks an environment that was interrupted while it was being written. pip takes the
rem CPU and the GPU build of torch for one version, so a change of device also starts afresh.
set "VENV_PYTHON=.venv\Scripts\python.exe"
set "OTHER=gpu"
if "%FLAVOUR%"=="gpu" set "OTHER=cpu"
if exist .venv\.unfinished goto make_venv
if exist .venv\.installed-%OTHER% goto make_venv
if not exist %VENV_PYTHON% goto make_venv
%VENV_PYTHON% -c "import pip, sys; sys.exit(sys.version_info < (3, 11))" >nul 2>&1
if %ERRORLEVEL% equ 0 goto install

:make_venv
call :find_python
if not defined FOUND exit /b 1
echo Making .venv with %FOUND% ...
if exist .venv rmdir /s /q .venv
mkdir .venv
echo interrupted>.venv\.unfinished
%FOUND% -m venv .venv
if %ERRORLEVEL% neq 0 goto venv_failed
del .venv\.unfinished

rem On Windows the wheels on PyPI are CPU builds; PyTorch's own index has those with CUDA.
:install
set "OPTIONS="
if "%FLAVOUR%"=="gpu" set "OPTIONS=--extra-index-url https://download.pytorch.org/whl/cu130"
call :install_file %FLAVOUR%
if %ERRORLEVEL% neq 0 exit /b 1
if not defined DEMO goto choose_device
set "OPTIONS=--no-deps --require-hashes"
call :install_file demo
if %ERRORLEVEL% neq 0 exit /b 1

rem A DEVICE in the environment or in .env is the user's own choice.
:choose_device
if defined DEVICE goto run
if not exist .env goto device_free
findstr /r /i /c:"^ *DEVICE *=" .env >nul 2>&1
if %ERRORLEVEL% equ 0 goto run
:device_free
set "DEVICE=cpu"
if "%FLAVOUR%"=="gpu" set "DEVICE=cuda"

:run
if not defined DEMO goto serve
%VENV_PYTHON% -m app.demo .demo-model
if %ERRORLEVEL% neq 0 goto demo_failed
set "EMBEDDING_MODEL=%CD%\.demo-model"
set "HF_HUB_OFFLINE=1"
:serve
%VENV_PYTHON% -m app
exit /b %ERRORLEVEL%

:start_docker
set "COMPOSE_YML=docker-compose.%FLAVOUR%.yml"
docker --version >nul 2>&1
if %ERRORLEVEL% neq 0 goto no_docker
docker compose version >nul 2>&1
if %ERRORLEVEL% neq 0 goto no_compose
docker compose -f %COMPOSE_YML% up --build -d
if %ERRORLEVEL% neq 0 goto docker_failed
set "ADDRESS=127.0.0.1:8000"
for /f %%A in ('docker compose -f %COMPOSE_YML% port smart-embedder 8000') do set "ADDRESS=%%A"
echo Smart Embedder is starting; it is ready when http://%ADDRESS%/health says "healthy".
echo Logs: docker compose -f "%CD%\%COMPOSE_YML%" logs -f
exit /b 0

rem Sets FOUND to a command that runs Python 3.11 or newer.
:find_python
set "FOUND="
if defined PYTHON goto named_python
call :try_python py -3.13
call :try_python py -3.12
call :try_python py -3.11
call :try_python python3
call :try_python python
if defined FOUND exit /b 0
>&2 echo start_server: Python 3.11 or newer was not found: install it, or set PYTHON to its path.
exit /b 1

:named_python
call :try_python "%PYTHON%"
if defined FOUND exit /b 0
>&2 echo start_server: "PYTHON=%PYTHON%" is not a working Python 3.11 or newer.
exit /b 1

:try_python
if defined FOUND exit /b 0
%* -c "import sys; sys.exit(sys.version_info < (3, 11))" >nul 2>&1
if %ERRORLEVEL% equ 0 set FOUND=%*
exit /b 0

rem install_file NAME: bring .venv to the state of requirements-NAME.txt.
:install_file
set "REQUIREMENTS=requirements-%1.txt"
set "STAMP=.venv\.installed-%1"
if not exist %REQUIREMENTS% goto requirements_missing
set "READ=import hashlib, pathlib, sys; file, stamp = map(pathlib.Path, sys.argv[1:])"
set "READ=%READ%; wanted = hashlib.sha256(file.read_bytes()).hexdigest()"
set "COMPARE=%READ%; sys.exit(not stamp.exists() or stamp.read_text().strip() != wanted)"
%VENV_PYTHON% -c "%COMPARE%" %REQUIREMENTS% %STAMP%
if %ERRORLEVEL% equ 0 exit /b 0
echo Installing dependencies from %REQUIREMENTS% (first start only, a few minutes) ...
echo interrupted>.venv\.unfinished
rem Where PyTorch's own index is out of reach, pip would ask it five times for every package.
if not defined PIP_RETRIES set "PIP_RETRIES=2"
%VENV_PYTHON% -m pip install --disable-pip-version-check --no-input %OPTIONS% -r %REQUIREMENTS%
if %ERRORLEVEL% neq 0 goto pip_failed
del .venv\.unfinished
%VENV_PYTHON% -c "%READ%; stamp.write_text(wanted)" %REQUIREMENTS% %STAMP%
exit /b %ERRORLEVEL%

:requirements_missing
>&2 echo start_server: %REQUIREMENTS% is missing from "%CD%".
exit /b 1

rem pip downloads everything before it changes anything; an interruption leaves the mark in place.
:pip_failed
del .venv\.unfinished
>&2 echo start_server: pip could not install %REQUIREMENTS%; its message above says why.
exit /b 1

:venv_failed
>&2 echo start_server: %FOUND% could not make .venv; its message above says why.
exit /b 1

:demo_failed
>&2 echo start_server: the demo model could not be made.
exit /b 1

:no_docker
>&2 echo start_server: docker was not found: install Docker Desktop, or use "start_server.bat local".
exit /b 1

:no_compose
>&2 echo start_server: "docker compose" was not found: install Docker's compose plugin, 2.24 or newer.
exit /b 1

:docker_failed
>&2 echo start_server: docker compose could not start the service; its message above says why.
exit /b 1

:usage
>&2 echo Usage: start_server.bat [local^|docker] [cpu^|gpu^|auto] [--demo]
>&2 echo   local    run in .venv in this folder, which is made on the first start
>&2 echo   docker   build and run the container (the default)
>&2 echo   auto     gpu if nvidia-smi works, else cpu (the default)
>&2 echo   --demo   with local: serve a small model that needs no download from a model hub
exit /b 1
