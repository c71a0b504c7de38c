@echo off
rem Starts Smart Embedder in a container (docker), or in a virtual environment (local). For the latter it
rem only finds a Python, and launcher\ does the rest.
rem Programs are started by `call`, because one may be a batch file, such as pyenv's python, which would
rem not return otherwise.
setlocal EnableExtensions DisableDelayedExpansion
rem pushd gives a network folder a drive letter until popd.
pushd "%~dp0"
call :main %*
set "STATUS=%ERRORLEVEL%"
popd
if %STATUS% equ 0 exit /b 0
rem If Explorer has opened the window for this file, wait for a key so that the message can be read.
if not defined CMDCMDLINE exit /b %STATUS%
set "CALLED=%CMDCMDLINE:"=%"
call set "REST=%%CALLED:%~f0=%%"
if "%REST%"=="%CALLED%" exit /b %STATUS%
rem timeout fails if the input is not a console, where nobody can press a key.
call timeout /t 0 >nul 2>&1
if %ERRORLEVEL% equ 0 pause
exit /b %STATUS%

:main
set "FLAVOUR="
call :read_flavour %*
if defined FLAVOUR goto start_container
rem The server would import packages of another environment from these before its own.
set "PYTHONPATH="
set "PYTHONHOME="
set "PYTHONSAFEPATH="
set "FOUND="
if defined PYTHON goto named_python
for %%V in ("py -3.13" "py -3.12" "py -3.11" python3 python .venv\Scripts\python.exe) do call :try_python %%~V
if not defined FOUND goto python_missing

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

rem Sets FLAVOUR to cpu, gpu or auto if the arguments ask for a container.
:read_flavour
if /i "%~1"=="docker" shift
if "%~1"=="" set "FLAVOUR=auto"
for %%W in (cpu gpu auto) do if /i "%~1"=="%%W" set "FLAVOUR=%%W"
if not "%~2"=="" set "FLAVOUR="
exit /b 0

:start_container
call docker --version >nul 2>&1
if %ERRORLEVEL% neq 0 goto docker_missing
call docker compose version >nul 2>&1
if %ERRORLEVEL% neq 0 goto compose_missing
call docker info >nul 2>&1
if %ERRORLEVEL% neq 0 goto daemon_missing
rem Values that compose passes to the service, from the environment or .env: VALUE_DEVICE and so on.
set "NAMES=DEVICE DENSE_EMBEDDING_MODEL RERANKER_MODEL QWEN_RERANK_BATCH_SIZE QWEN_RERANK_MAX_LENGTH"
for %%N in (%NAMES%) do set "VALUE_%%N="
for /f "tokens=1,2" %%A in ('docker compose -f docker-compose.gpu.yml config') do (
  for %%N in (%NAMES%) do if "%%A"=="%%N:" if not "%%~B"=="null" set "VALUE_%%N=%%~B"
)
set "KIND=%VALUE_DEVICE:~0,4%"
if not "%FLAVOUR%"=="gpu" goto is_it_auto
if /i not "%KIND%"=="cuda" call :choose DEVICE cuda
goto ask_models
:is_it_auto
if not "%FLAVOUR%"=="auto" goto ask_models
set "FLAVOUR=cpu"
if /i "%KIND%"=="cuda" set "FLAVOUR=gpu"
if /i not "%VALUE_DEVICE%"=="auto" goto ask_models
call nvidia-smi >nul 2>&1
if %ERRORLEVEL% equ 0 set "FLAVOUR=gpu"
:ask_models
rem timeout fails if the input is not a console, and then nothing is asked.
call timeout /t 0 >nul 2>&1
if %ERRORLEVEL% neq 0 goto asked
call :ask_model DENSE_EMBEDDING_MODEL "Dense model" dense.txt "" Qwen/Qwen3-Embedding-0.6B
call :ask_model RERANKER_MODEL Reranker reranker.txt BAAI/bge-reranker-v2-m3 Qwen/Qwen3-Reranker-0.6B
:asked
if defined VALUE_RERANKER_MODEL call :tune_reranker
call docker compose -f docker-compose.%FLAVOUR%.yml up --build -d
if %ERRORLEVEL% neq 0 goto docker_failed
echo Smart Embedder is starting. Logs: docker compose -f "%~dp0docker-compose.%FLAVOUR%.yml" logs -f
exit /b 0

rem Sets a variable for compose, and prints it.
:choose
set "%~1=%~2"
echo Set for this start: %~1=%~2.
exit /b 0

rem Asks for a model that is not set, as launcher\console.py does; no answer means BGE.
:ask_model
if defined VALUE_%~1 exit /b 0
type launcher\%~3
:ask_again
set "ANSWER="
set /p "ANSWER=%~2, BGE or QWEN [BGE]: "
if not defined ANSWER set "ANSWER=BGE"
if /i "%ANSWER%"=="BGE" goto answered_bge
if /i "%ANSWER%"=="QWEN" goto answered_qwen
echo That is neither BGE nor QWEN.
goto ask_again
:answered_bge
if not "%~4"=="" set "%~1=%~4"
exit /b 0
:answered_qwen
set "%~1=%~5"
set "VALUE_%~1=%~5"
exit /b 0

rem Sets the limits of a Qwen reranker as launcher\gpu.py does, by the memory of the smallest GPU in MiB.
:tune_reranker
if /i "%VALUE_RERANKER_MODEL:qwen=%"=="%VALUE_RERANKER_MODEL%" exit /b 0
set "BATCH=1"
set "LENGTH=2048"
if "%FLAVOUR%"=="cpu" goto set_limits
set "SMALLEST="
for /f %%M in ('nvidia-smi --query-gpu^=memory.total --format^=csv^,noheader^,nounits') do call :compare %%M
if not defined SMALLEST exit /b 0
set "BATCH=16"
set "LENGTH=8192"
if %SMALLEST% leq 8192 set "BATCH=8"
if %SMALLEST% leq 6144 set "BATCH=4"
if %SMALLEST% leq 6144 set "LENGTH=4096"
:set_limits
if not defined VALUE_QWEN_RERANK_BATCH_SIZE call :choose QWEN_RERANK_BATCH_SIZE %BATCH%
if not defined VALUE_QWEN_RERANK_MAX_LENGTH call :choose QWEN_RERANK_MAX_LENGTH %LENGTH%
exit /b 0

:compare
for /f "delims=0123456789" %%X in ("%~1") do exit /b 0
if not defined SMALLEST set "SMALLEST=%~1"
if %~1 lss %SMALLEST% set "SMALLEST=%~1"
exit /b 0

:python_missing
>&2 echo start_server: Python 3.11 or newer was not found: install it, or set PYTHON to its path.
exit /b 1

:docker_missing
>&2 echo start_server: docker was not found: install Docker, or use 'start_server.bat local'.
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
